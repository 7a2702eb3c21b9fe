// What each file of the library sees first. All its calls are made under one lock of ours, and it has no threads: so what it locks for
// itself is locked, and what it does in one piece is. That was a tenth of its time.

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
