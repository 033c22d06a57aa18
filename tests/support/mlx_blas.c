/* The one product that MLX takes from a BLAS, handed to NumPy's OpenBLAS, whose integers have 64 bits. */
#include <stdint.h>

typedef int64_t wide;
typedef void product(int, int, int, wide, wide, wide, float, const float *, wide, const float *, wide, float, float *, wide);

product *kvasir_product; /* set before the first call */

void cblas_sgemm(int order, int left, int right, int m, int n, int k, float alpha, const float *a, int lda,
                 const float *b, int ldb, float beta, float *c, int ldc)
{
    kvasir_product(order, left, right, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
}
