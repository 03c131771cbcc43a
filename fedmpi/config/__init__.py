"""Settings: what can be set (`run`), how it is written (`grammar`), one run's settings as resolved (`build`)."""
