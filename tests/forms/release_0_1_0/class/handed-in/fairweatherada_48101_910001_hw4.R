# Ada Fairweather
average <- function(values) {
  sum(values) / length(values)  # no check for nothing
}
