// Included first by each file of the library. All calls to the library are made under one lock of ours, and the library
// has no threads, so its own locks and atomic operations, a tenth of its time, are redundant.

#include <pthread.h>

#define pthread_mutex_lock(lock) ((void)(lock), 0)
#define pthread_mutex_unlock(lock) ((void)(lock), 0)
#define pthread_rwlock_rdlock(lock) ((void)(lock), 0)
#define pthread_rwlock_wrlock(lock) ((void)(lock), 0)
#define pthread_rwlock_tryrdlock(lock) ((void)(lock), 0)
#define pthread_rwlock_unlock(lock) ((void)(lock), 0)

#define holdfast_change(at, operator, by)                                      \
	({                                                                     \
		__typeof__(at) holdfast_at = (at);                             \
		__typeof__(*(at)) holdfast_before = *holdfast_at;              \
		*holdfast_at = holdfast_before operator(by);                   \
		holdfast_before;                                               \
	})
#define __sync_fetch_and_add(at, by) holdfast_change(at, +, by)
#define __sync_fetch_and_sub(at, by) holdfast_change(at, -, by)
#define __sync_bool_compare_and_swap(at, old, new) (*(at) == (old) ? (*(at) = (new), 1) : 0)
