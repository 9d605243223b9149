"""Watch, start, compare and try runs in a browser, and a jobs API that OpenAI's client speaks.

The board owns nothing: it reads what runs write anyway, and starts the commands that it shows.
"""
