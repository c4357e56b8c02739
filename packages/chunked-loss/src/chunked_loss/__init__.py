"""lm_head and cross entropy without ever holding the [T, V] logits."""
