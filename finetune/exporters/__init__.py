"""Write a result in a form that other libraries load."""
