"""Algorithms, one class in one file and one row in `registry` each, and their arithmetic as pure functions.

The configuration imports the classes, so that neither they nor `contract` load torch at their import. No other
package names one of them.

May import quartet. commands, config, deployment, evaluation, experience, loop and policy import it.
"""
