"""afina: adapt Transformer models with a fraction of the cost of full fine-tuning."""
