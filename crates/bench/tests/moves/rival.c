/* The same program under another name, so that its processes are told apart. */
#include "locks.c"
