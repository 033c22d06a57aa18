# Homework 4, Riverside Outfitters
source("report.R")
orders <- read.csv("orders.csv")
customers <- read.csv("customers.csv")

n_doubled <- sum(duplicated(orders$order_id))
orders <- unique(orders)
n_incomplete <- sum(is.na(orders$amount))
orders <- na.omit(orders)

# the last three months
recent <- orders$customer_id[orders$order_date >= "2023-10-01"]
share_churned <- round(100 * mean(!customers$customer_id %in% recent))
mean_amount <- round(mean(orders$amount))

report(n_doubled)
report(n_incomplete)
report(share_churned)
# n_doubled=37
# n_incomplete=58
# share_churned=30
# So mean_amount=84 here.
# I could not compute max_month.
