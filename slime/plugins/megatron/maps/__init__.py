"""Maps between Hugging Face and Megatron weights: one file per model family, for loading, weight
sync and export.
"""
