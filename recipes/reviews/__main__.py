"""`python -m recipes.reviews --out models/reviews --seed 0`"""

from recipes.common.command import run
from recipes.reviews.make import make
from recipes.reviews.settings import Settings

run("reviews", lambda out, seed, console: make(out, Settings(seed=seed), console))
