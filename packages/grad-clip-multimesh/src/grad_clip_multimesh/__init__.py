"""Gradient norm and clipping over gradients on any mix of meshes."""
