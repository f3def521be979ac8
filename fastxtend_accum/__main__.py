"`python -m fastxtend_accum` trains on made-up data and shows what the callbacks do (see the page `demo`)"
import warnings

warnings.filterwarnings('ignore', module='torch|fastai')  # deprecations in newer torch and pandas
from fastxtend_accum.demo import main

if __name__ == '__main__': main()
