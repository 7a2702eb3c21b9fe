/* Builds locks.c under another name, so that processes of rivals can be told apart. */
#include "locks.c"
