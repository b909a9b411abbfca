"""What others add to Quartet, each as one file: see docs/extend.md. The tests run them.

May import quartet and services. Nothing imports it.
"""
