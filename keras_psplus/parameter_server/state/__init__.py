"""State of compressors and update rules that lives on workers."""
