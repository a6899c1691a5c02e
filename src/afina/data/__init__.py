"""From a file of anything to the rows of an optimiser step: read, recognise, render, mask, pack, order.

Nothing is imported here, so that `afina.data.settings` stays as light as pydantic.
"""
