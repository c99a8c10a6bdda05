"""What turns the text sources into notebooks, translations and documents. Nothing that a lesson imports."""
