//! Decides whether and how long to wait for send queues.
//!
//! A queue of `q` bytes on a path with a recent throughput of `r` bytes a second is predicted to be empty after `q / r`
//! and two round trips (the last acknowledgement, and one lost on the way). The wait is twice that, within the limit. A
//! flow predicted to need more than the limit does not wait: most of its queue would be full either way.

use super::SendQueueInfo;
use core::time::Duration;

/// Slack added to every wait, for the granularity of timers.
const TIMER_SLACK: Duration = Duration::from_millis(10);

/// Returns the time until the send queue is expected to be empty; none if the path's rate is unknown.
pub(super) fn predict_drain_time(queue: &SendQueueInfo) -> Option<Duration> {
    let outstanding = u64::from(queue.unsent) + u64::from(queue.unacked);
    if outstanding == 0 {
        return Some(Duration::ZERO);
    }
    if queue.delivery_rate == 0 {
        return None;
    }
    let nanos = u128::from(outstanding) * 1_000_000_000 / u128::from(queue.delivery_rate);
    let sending = Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX));
    Some(sending.saturating_add(queue.rtt * 2))
}

/// Returns how long to wait for this queue: zero if it is empty or not worth a wait.
pub(super) fn drain_wait(queue: &SendQueueInfo, limit: Duration) -> Duration {
    match predict_drain_time(queue) {
        Some(Duration::ZERO) => Duration::ZERO,
        Some(predicted) if predicted > limit => Duration::ZERO,
        Some(predicted) => (predicted.saturating_mul(2).saturating_add(TIMER_SLACK)).min(limit),
        None => limit,
    }
}

/// Returns the bytes of queues that are expected to move, after a wait of at most `limit`, if there is one.
pub(super) fn bytes_to_move(queue: &SendQueueInfo, limit: Option<Duration>) -> usize {
    let sending = queue.unsent as usize + queue.unacked as usize;
    let drained = limit.is_some_and(|limit| drain_wait(queue, limit) > Duration::ZERO);
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
    fn wait_is_proportional_to_queue_and_rate() {
        let queue_90kb = queue(90_000, 12_500_000);
        assert_eq!(
            predict_drain_time(&queue_90kb),
            Some(Duration::from_micros(9_200))
        );
        assert_eq!(
            drain_wait(&queue_90kb, LIMIT),
            Duration::from_micros(28_400)
        );
        assert_eq!(bytes_to_move(&queue_90kb, Some(LIMIT)), 0);
        assert_eq!(bytes_to_move(&queue_90kb, None), 90_000);
    }

    #[test]
    fn empty_and_undrainable_queues_cause_no_wait() {
        assert_eq!(drain_wait(&queue(0, 0), LIMIT), Duration::ZERO);
        let hopeless = queue(u32::MAX, 1);
        assert_eq!(drain_wait(&hopeless, LIMIT), Duration::ZERO);
        assert_eq!(bytes_to_move(&hopeless, Some(LIMIT)), u32::MAX as usize);
    }

    #[test]
    fn unknown_rate_waits_the_full_limit() {
        assert_eq!(drain_wait(&queue(1, 0), LIMIT), LIMIT);
    }

    #[test]
    fn unread_bytes_always_move() {
        let unread = SendQueueInfo {
            unread: 7,
            ..queue(5, 1_000)
        };
        assert_eq!(bytes_to_move(&unread, Some(LIMIT)), 7);
    }
}
