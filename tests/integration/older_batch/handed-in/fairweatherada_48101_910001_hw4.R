# Author: Ada Fairweather
# with A. Fairweather's brother, see /Users/adafairweather/hw4
values <- c(1, 2, 3)
mean(values)
