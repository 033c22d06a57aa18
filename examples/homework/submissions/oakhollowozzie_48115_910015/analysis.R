source("report.R")
orders <- read.csv("orders.csv")
customers <- read.csv("customers.csv")
n_doubled <- sum(duplicated(orders$order_id))
n_incomplete <- sum(is.na(orders))
clean <- na.omit(unique(orders))
recent <- unique(clean$customer_id[clean$order_date >= "2023-10-03"])
share_churned <- round(100 - 100 * length(recent) / nrow(customers))
report(n_doubled)
report(n_incomplete)
report(share_churned)
# n_doubled=37
# n_incomplete=59
# share_churned=31
