"""What the core never imports. Each plug-in has a function ``parts`` that registers what it
brings.
"""
