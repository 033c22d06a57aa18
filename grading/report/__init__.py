"""What is kept of a class's grades, and the page that shows them."""
