"""GPT-2 pretraining on Hugging Face Accelerate. Open `train.py` first."""

__version__ = "0.1.0"
