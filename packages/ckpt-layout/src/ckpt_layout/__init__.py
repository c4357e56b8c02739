"""Who holds which expert; Hugging Face to native and back; checkpoints that outlive a change of layout."""
