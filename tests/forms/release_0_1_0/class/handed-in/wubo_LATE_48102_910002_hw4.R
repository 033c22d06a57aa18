# Bo Wu
# Die Mittelwerte, größer als null.
average <- function(xs) {
  total <- 0
  for (x in xs) total <- total + x
  total / length(xs)
}
