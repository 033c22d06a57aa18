# by Bo Wu, with Ada Fairweather
total <- sum(c(1, 2))
total / 2
