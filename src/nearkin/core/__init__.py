"""Pure tensor functions under every loss and metric; needs torch only."""
