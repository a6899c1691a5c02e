"""The techniques, one file each, all of one shape; `afina.table` gathers them."""
