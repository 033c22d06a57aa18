-- Riverside Outfitters. I did the homework in SQLite, I hope that is fine.

-- 1. cleaning
CREATE TABLE clean AS
SELECT order_id, customer_id, order_date, region, amount
FROM orders
WHERE amount IS NOT NULL
GROUP BY order_id;

SELECT COUNT(*) - COUNT(DISTINCT order_id) AS duplicates, SUM(amount IS NULL) AS missing FROM orders;

-- 2. revenue by month and region
SELECT strftime('%Y-%m', order_date) AS month, region, ROUND(SUM(amount)) AS revenue
FROM clean
WHERE order_date BETWEEN '2023-01-01' AND '2023-12-31'
GROUP BY month, region
ORDER BY month, region;

-- 3. churn
SELECT member,
       AVG(CASE WHEN last_order >= '2023-10-02' THEN 0.0 ELSE 1.0 END) AS churn_rate,
       COUNT(*) AS customers
FROM customers
LEFT JOIN (SELECT customer_id, MAX(order_date) AS last_order FROM clean GROUP BY customer_id)
       USING (customer_id)
GROUP BY member;
-- FALSE 0.4137 568, TRUE 0.2206 612

-- 4. members churn half as often: 22% against 41%
