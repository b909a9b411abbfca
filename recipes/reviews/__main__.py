"""`python -m recipes.reviews --out models/reviews --seed 0`"""

from quartet.threads import ending_quietly
from recipes.common.command import run
from recipes.reviews.make import make
from recipes.reviews.settings import Settings

with ending_quietly():
    run("reviews", lambda out, seed, console: make(out, Settings(seed=seed), console))
