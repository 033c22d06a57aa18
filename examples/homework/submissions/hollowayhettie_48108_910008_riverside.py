"""Riverside Outfitters, homework 4."""

import pandas as pd

orders = pd.read_csv("orders.csv", parse_dates=["order_date"])
customers = pd.read_csv("customers.csv")

before = len(orders)
orders = orders.drop_duplicates("order_id")
print("duplicates removed:", before - len(orders))
before = len(orders)
orders = orders.dropna(subset=["amount"])
print("without amount:", before - len(orders))

orders = orders[orders.order_date.dt.year == 2023]
table = orders.groupby([orders.order_date.dt.month, "region"]).amount.sum().unstack()
print(table.round())

# 90 days before the end of the year
recent = set(orders.loc[orders.order_date >= "2023-10-02", "customer_id"])
customers["churned"] = ~customers.customer_id.isin(recent)
print("churn rate:", customers.churned.mean())

# Interpretation: the table shows that Lakes has the most revenue in July and the North does not change much.
# The churn rate is 31 percent. That is nearly every third customer.
# Recommendation: send a voucher to customers who did not order for 60 days.
