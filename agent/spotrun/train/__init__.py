"""What a training script imports. Knows neither the head nor any cloud."""
