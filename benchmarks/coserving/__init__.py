"""Claims of serving and finetuning on one device."""
