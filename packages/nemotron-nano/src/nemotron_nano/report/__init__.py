"""What a run shows and leaves behind: the terminal, `metrics.jsonl`, plots and tables."""
