//! Decides whether and how long to wait for send queues.
//!
//! A queue of `q` bytes on a path with a recent throughput of `r` bytes a second is predicted to be empty after `q / r`
//! and two round trips (the last acknowledgement, and one lost on the way). The wait is twice that, within the limit. A
//! flow predicted to need more than the limit does not wait: most of its queue would be full either way.

use super::SendQueueInfo;
use core::time::Duration;

/// Slack added to every wait, for the granularity of timers.
const SLACK: Duration = Duration::from_millis(10);

/// Returns the time until the send queue is expected to be empty; none if the path's rate is unknown.
pub(super) fn predict(queue: &SendQueueInfo) -> Option<Duration> {
    let bytes = u64::from(queue.unsent) + u64::from(queue.unacked);
    if bytes == 0 {
        return Some(Duration::ZERO);
    }
    if queue.delivery_rate == 0 {
        return None;
    }
    let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(queue.delivery_rate);
    let sending = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    Some(sending.saturating_add(queue.rtt * 2))
}

/// Returns how long to wait for this queue: zero if it is empty or not worth a wait.
pub(super) fn wait(queue: &SendQueueInfo, limit: Duration) -> Duration {
    match predict(queue) {
        Some(Duration::ZERO) => Duration::ZERO,
        Some(predicted) if predicted > limit => Duration::ZERO,
        Some(predicted) => (predicted.saturating_mul(2).saturating_add(SLACK)).min(limit),
        None => limit,
    }
}

/// Returns the bytes of queues that are expected to move, after a wait of at most `limit`, if there is one.
pub(super) fn bytes_left(queue: &SendQueueInfo, limit: Option<Duration>) -> usize {
    let sending = queue.unsent as usize + queue.unacked as usize;
    let drained = limit.is_some_and(|limit| wait(queue, limit) > Duration::ZERO);
    queue.unread as usize + if drained { 0 } else { sending }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn queue(unsent: u32, delivery_rate: u64) -> SendQueueInfo {
        SendQueueInfo {
            unsent,
            delivery_rate,
            rtt: Duration::from_millis(1),
            ..SendQueueInfo::default()
        }
    }

    const LIMIT: Duration = Duration::from_secs(1);

    #[test]
    fn the_wait_follows_the_queue_and_the_rate() {
        let ninety = queue(90_000, 12_500_000);
        assert_eq!(predict(&ninety), Some(Duration::from_micros(9_200)));
        assert_eq!(wait(&ninety, LIMIT), Duration::from_micros(28_400));
        assert_eq!(bytes_left(&ninety, Some(LIMIT)), 0);
        assert_eq!(bytes_left(&ninety, None), 90_000);
    }

    #[test]
    fn an_empty_queue_and_a_hopeless_one_are_not_waited_for() {
        assert_eq!(wait(&queue(0, 0), LIMIT), Duration::ZERO);
        let hopeless = queue(u32::MAX, 1);
        assert_eq!(wait(&hopeless, LIMIT), Duration::ZERO);
        assert_eq!(bytes_left(&hopeless, Some(LIMIT)), u32::MAX as usize);
    }

    #[test]
    fn an_unknown_rate_gets_the_whole_limit() {
        assert_eq!(wait(&queue(1, 0), LIMIT), LIMIT);
    }

    #[test]
    fn unread_bytes_move_whatever_is_drained() {
        let unread = SendQueueInfo {
            unread: 7,
            ..queue(5, 1_000)
        };
        assert_eq!(bytes_left(&unread, Some(LIMIT)), 7);
    }
}
