"""`python -m recipes.addition --out models/addition --seed 0`"""

from quartet.threads import ending_quietly
from recipes.addition.make import make
from recipes.addition.settings import Settings
from recipes.common.command import run

with ending_quietly():
    run("addition", lambda out, seed, console: make(out, Settings(seed=seed), console))
