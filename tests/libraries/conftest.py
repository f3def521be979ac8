"Other libraries are not imported unless their tests are asked for"
def pytest_ignore_collect(config): return config.option.markexpr != 'libraries' or None
