//! Detection of a server that takes none of the clients that wait for it.
//!
//! The kernel completes handshakes for a server that is stopped or hangs, so that its queue of unaccepted connections
//! grows. A busy server has a queue as well, but takes clients from it.

use super::event::ListenerSample;
use core::time::Duration;
use std::collections::BTreeMap;

/// The queues of a service's sockets over time.
#[derive(Debug, Default)]
pub(super) struct AcceptQueueHistory {
    sockets: BTreeMap<u64, SocketQueue>,
    /// Most accepted connections that any sample has shown. The count of handshakes may lag behind the queue, so that a
    /// later sample shows fewer. `None` before the first sample.
    accepted_max: Option<i64>,
}

/// The queue of clients that wait at one socket.
#[derive(Debug, Clone, Copy)]
struct SocketQueue {
    waiting: u32,
    /// Time since which clients wait and none is taken; `None` while none waits.
    untouched_since: Option<Duration>,
}

impl AcceptQueueHistory {
    /// Takes a sample of a service's sockets into account.
    pub fn on_sample(&mut self, now: Duration, sample: &ListenerSample) {
        let waiting: i64 = sample
            .queues
            .iter()
            .map(|queue| i64::from(queue.waiting))
            .sum();
        // With one socket, a handshake that is not in the queue has been accepted.
        let accepted = (sample.handshakes)
            .and_then(|handshakes| i64::try_from(handshakes).ok())
            .filter(|_| sample.queues.len() == 1)
            .map(|handshakes| handshakes - waiting);
        let has_accepted = (accepted.zip(self.accepted_max)).is_some_and(|(now, max)| now > max);
        let mut sockets = BTreeMap::new();
        let mut is_emptied = true;
        for queue in &sample.queues {
            let before = self.sockets.get(&queue.socket);
            let has_taken = before.is_some_and(|before| queue.waiting < before.waiting);
            let untouched_since = match before.and_then(|before| before.untouched_since) {
                _ if queue.waiting == 0 => None,
                Some(since) if !has_taken && !has_accepted => Some(since),
                _ => Some(now),
            };
            is_emptied &= untouched_since.is_none() || has_taken;
            let waiting = queue.waiting;
            sockets.insert(
                queue.socket,
                SocketQueue {
                    waiting,
                    untouched_since,
                },
            );
        }
        self.sockets = sockets;
        if has_accepted || is_emptied || self.accepted_max.is_none() {
            self.accepted_max = accepted.or(self.accepted_max);
        }
    }

    /// Returns the number of clients that wait at a socket from which none was taken for `stall_after`; `None` if there
    /// is no such socket.
    pub fn stalled(&self, now: Duration, stall_after: Duration) -> Option<u32> {
        let is_stalled = |queue: &&SocketQueue| {
            queue
                .untouched_since
                .is_some_and(|since| now >= since + stall_after)
        };
        let stalled = self.sockets.values().filter(is_stalled);
        stalled.map(|queue| queue.waiting).max()
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::QueueSample;
    use super::*;

    const STALL: Duration = Duration::from_millis(500);

    fn sample(handshakes: u64, waiting: &[u32]) -> ListenerSample {
        let queue = |(socket, waiting): (u64, &u32)| QueueSample {
            socket,
            waiting: *waiting,
        };
        ListenerSample {
            queues: (1..).zip(waiting).map(queue).collect(),
            handshakes: Some(handshakes),
        }
    }

    /// Feeds samples 100 ms apart; returns the result after each.
    fn run(samples: &[ListenerSample]) -> Vec<Option<u32>> {
        let mut queues = AcceptQueueHistory::default();
        (0..)
            .zip(samples)
            .map(|(index, sample)| {
                let now = Duration::from_millis(100 * index);
                queues.on_sample(now, sample);
                queues.stalled(now, STALL)
            })
            .collect()
    }

    #[test]
    fn growing_queue_without_accepts_is_stalled() {
        let samples: Vec<_> = (0..8)
            .map(|i| sample(50 + 30 * i, &[30 * i as u32]))
            .collect();
        let stalled = run(&samples);
        assert_eq!(stalled[5], None);
        assert_eq!(stalled[6], Some(180));
    }

    #[test]
    fn growing_queue_with_accepts_is_not_stalled() {
        // 30 clients arrive between two samples, and 10 are accepted.
        let samples: Vec<_> = (0..20).map(|i| sample(30 * i, &[20 * i as u32])).collect();
        assert!(run(&samples).iter().all(Option::is_none));
    }

    #[test]
    fn late_count_of_handshakes_is_no_accept() {
        // The count lags behind the queue by 5 in one sample, and catches up in the next.
        let mut samples: Vec<_> = (0..8)
            .map(|i| sample(50 + 30 * i, &[30 * i as u32]))
            .collect();
        samples[3].handshakes = Some(135);
        assert_eq!(run(&samples)[6], Some(180));
    }

    #[test]
    fn one_waiting_client_is_enough() {
        let samples = vec![sample(1, &[1]); 7];
        assert_eq!(run(&samples)[5], Some(1));
    }

    #[test]
    fn resumed_server_is_not_stalled() {
        let mut samples = vec![sample(9, &[9]); 7];
        samples.push(sample(9, &[4]));
        samples.push(sample(9, &[0]));
        let stalled = run(&samples);
        assert_eq!(stalled[6..], [Some(9), None, None]);
    }

    #[test]
    fn one_stopped_worker_of_several_is_stalled() {
        // Two sockets share a port; the second worker empties its queue.
        let samples: Vec<_> = (0..8)
            .map(|i| sample(40 * i, &[1 + 10 * i as u32, 0]))
            .collect();
        assert_eq!(run(&samples)[6], Some(61));
    }

    #[test]
    fn datagrams_that_nobody_reads_are_stalled() {
        let unread = ListenerSample {
            handshakes: None,
            ..sample(0, &[768])
        };
        assert_eq!(run(&vec![unread; 7])[5], Some(768));
    }
}
