"""An adapter's life on disk."""
