"""What makes and proves the product and is not shipped with it."""
