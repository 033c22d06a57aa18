library(tidyverse)

orders <- read_csv("orders.csv")
n0 <- nrow(orders)
orders <- orders %>% distinct(order_id, .keep_all = TRUE)
n1 <- nrow(orders)
orders <- orders %>% filter(!is.na(amount))
cat(n0 - n1, "double,", n1 - nrow(orders), "without amount\n")

rev <- orders %>%
  filter(lubridate::year(order_date) == 2023) %>%
  group_by(month = lubridate::month(order_date), region) %>%
  summarise(revenue = sum(amount), .groups = "drop")
ggplot(rev, aes(month, revenue, colour = region)) + geom_line() + labs(x = "Month of 2023", y = "Dollars")

customers <- read_csv("customers.csv")
joined <- left_join(customers, orders %>% group_by(customer_id) %>% summarise(last = max(order_date)))
joined$churned <- joined$last < as.Date("2023-10-02")
mean(joined$churned, na.rm = TRUE)
aggregate(churned ~ member, joined, mean)
