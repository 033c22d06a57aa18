# Homework 4, Riverside Outfitters
library(dplyr)
library(ggplot2)

orders <- read.csv("orders.csv")
customers <- read.csv("customers.csv")

# cleaning
dim(orders)
orders <- distinct(orders, order_id, .keep_all = TRUE)
orders <- orders[!is.na(orders$amount), ]
dim(orders)   # 4117 rows are left, so 95 are gone

# revenue by month
orders$order_date <- as.Date(orders$order_date)
orders$month <- format(orders$order_date, "%Y-%m")
rev <- orders %>%
  filter(format(order_date, "%Y") == "2023") %>%
  group_by(month, region) %>%
  summarise(revenue = sum(amount))
print(rev)
ggplot(rev, aes(month, revenue, group = region, color = region)) + geom_line()

# churn: customers whose last order is before October 2
last <- orders %>% group_by(customer_id) %>% summarise(last_order = max(order_date))
last <- inner_join(last, customers, by = "customer_id")
mean(last$last_order < as.Date("2023-10-02"))   # 0.287
tapply(last$last_order < as.Date("2023-10-02"), last$member, mean)

# The Lakes line goes up a lot in summer (July about 61000 dollars) and comes down in November.
# 28.7% of customers churned. Members churn less than the others.
# I recommend a winter campaign in the Lakes shops because that is where revenue falls most.
