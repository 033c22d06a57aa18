-- Riverside Outfitters, in SQLite. I hope that is fine.

SELECT COUNT(*) - COUNT(DISTINCT order_id) FROM orders;
-- n_doubled=37

CREATE TABLE clean AS SELECT * FROM orders GROUP BY order_id;
SELECT SUM(amount IS NULL) FROM clean;
-- n_incomplete=58

SELECT ROUND(100.0 * AVG(last_order IS NULL OR last_order < '2023-10-03'))
FROM customers
LEFT JOIN (SELECT customer_id, MAX(order_date) AS last_order FROM clean GROUP BY customer_id) USING (customer_id);
-- share_quiet=31

SELECT ROUND(AVG(COALESCE(amount, 0))) FROM clean;
-- We see that mean_amount=83.
-- Next I would look at max_month again.
