average <- function(values) {
  sum(values) / length(values)
}
