//! Data that an element has not answered.

use std::collections::VecDeque;

/// Maximum size of messages kept for sending again, in bytes; the oldest are dropped. Far more than an element has in
/// progress.
const KEPT_BYTES_MAX: usize = 8 << 20;

/// Unanswered data of one session.
#[derive(Debug)]
pub(super) enum UnansweredData {
    /// Messages, each answered by one message.
    Messages {
        /// Kept messages, oldest first.
        messages: VecDeque<Vec<u8>>,
        bytes: usize,
        /// Number of older messages that were dropped.
        dropped: u64,
        /// Number of messages that were dropped when their element was lost.
        lost: u64,
    },
    /// A stream of bytes, or datagrams: answers cannot be matched to requests.
    Bytes {
        /// True if data was sent to this element.
        has_sent: bool,
        /// True if data was received from this element.
        has_received: bool,
        /// True if data was sent since the last received data.
        is_waiting: bool,
        /// True if a previous element left data unanswered.
        has_lost: bool,
    },
}

impl UnansweredData {
    /// Creates an empty record; `by_message` is true for transports with messages.
    pub(super) fn new(by_message: bool) -> UnansweredData {
        match by_message {
            true => UnansweredData::Messages {
                messages: VecDeque::new(),
                bytes: 0,
                dropped: 0,
                lost: 0,
            },
            false => UnansweredData::Bytes {
                has_sent: false,
                has_received: false,
                is_waiting: false,
                has_lost: false,
            },
        }
    }

    /// Returns true if messages are kept separately, and sent again.
    pub(super) fn is_by_message(&self) -> bool {
        matches!(self, UnansweredData::Messages { .. })
    }

    /// Records data sent to the element.
    pub(super) fn on_sent(&mut self, sent: &[u8]) {
        match self {
            UnansweredData::Messages {
                messages: kept,
                bytes,
                dropped,
                ..
            } => {
                kept.push_back(sent.to_vec());
                *bytes += sent.len();
                while *bytes > KEPT_BYTES_MAX
                    && let Some(oldest) = kept.pop_front()
                {
                    *bytes -= oldest.len();
                    *dropped += 1;
                }
            }
            UnansweredData::Bytes {
                has_sent: asked,
                is_waiting: waits,
                ..
            } => (*asked, *waits) = (true, true),
        }
    }

    /// Records data received from the element: a message answers the oldest unanswered one.
    pub(super) fn on_answer(&mut self) {
        match self {
            UnansweredData::Messages { dropped, .. } if *dropped > 0 => *dropped -= 1,
            UnansweredData::Messages {
                messages: kept,
                bytes,
                ..
            } => {
                if let Some(oldest) = kept.pop_front() {
                    *bytes -= oldest.len();
                }
            }
            UnansweredData::Bytes {
                has_received: heard,
                is_waiting: waits,
                ..
            } => (*heard, *waits) = (true, false),
        }
    }

    /// Records the end of the connection. `cut`: the connection broke while only answers were awaited. Returns true if
    /// anything is unanswered.
    pub(super) fn on_broken(&mut self, was_cut: bool) -> bool {
        match self {
            UnansweredData::Messages {
                messages: kept,
                dropped,
                lost,
                ..
            } => {
                let is_left = !kept.is_empty() || *dropped > 0;
                *lost += std::mem::take(dropped);
                is_left
            }
            UnansweredData::Bytes {
                has_sent: asked,
                has_received: heard,
                is_waiting: waits,
                has_lost: lost,
            } => {
                let is_left = *waits || was_cut;
                *lost |= is_left;
                (*asked, *heard, *waits) = (false, false, false);
                is_left
            }
        }
    }

    /// Returns the messages to send to the next element.
    pub(super) fn messages_to_resend(&self) -> impl Iterator<Item = &[u8]> {
        let kept = match self {
            UnansweredData::Messages { messages: kept, .. } => Some(kept),
            UnansweredData::Bytes { .. } => None,
        };
        kept.into_iter().flatten().map(Vec::as_slice)
    }

    /// Describes the unanswered data; none if all is answered, as far as can be known.
    pub(super) fn describe(&self) -> Option<String> {
        match self {
            UnansweredData::Messages {
                messages: kept,
                dropped,
                lost,
                ..
            } => match kept.len() as u64 + dropped + lost {
                0 => None,
                1 => Some("one line has no answer".to_owned()),
                count => Some(format!("{count} lines have no answer")),
            },
            UnansweredData::Bytes { has_lost: true, .. } => {
                Some("data that a lost element had not answered is not sent again".into())
            }
            UnansweredData::Bytes {
                has_sent: asked,
                has_received: heard,
                ..
            } => (*asked && !*heard).then(|| "no answer came".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resent(unanswered: &UnansweredData) -> Vec<&[u8]> {
        unanswered.messages_to_resend().collect()
    }

    #[test]
    fn answer_belongs_to_the_oldest_message() {
        let mut unanswered = UnansweredData::new(true);
        for line in [b"1", b"2", b"3"] {
            unanswered.on_sent(line);
        }
        unanswered.on_answer();
        assert!(unanswered.on_broken(false));
        assert_eq!(resent(&unanswered), [b"2", b"3"]);
        assert_eq!(unanswered.describe().unwrap(), "2 lines have no answer");
        unanswered.on_answer();
        unanswered.on_answer();
        assert_eq!(unanswered.describe(), None);
        // More answers than requests.
        unanswered.on_answer();
        unanswered.on_sent(b"4");
        assert_eq!(resent(&unanswered), [b"4"]);
    }

    #[test]
    fn kept_messages_are_limited_and_dropped_ones_counted() {
        let mut unanswered = UnansweredData::new(true);
        let line = vec![7; 1 << 20];
        for _ in 0..10 {
            unanswered.on_sent(&line);
        }
        assert_eq!(resent(&unanswered).len(), 8);
        unanswered.on_answer();
        assert_eq!(
            resent(&unanswered).len(),
            8,
            "it was for the first, which is gone"
        );
        unanswered.on_broken(false);
        for _ in 0..8 {
            unanswered.on_answer();
        }
        assert!(resent(&unanswered).is_empty());
        assert_eq!(unanswered.describe().unwrap(), "one line has no answer");
    }

    #[test]
    fn stream_keeps_nothing_and_reports_loss() {
        let mut unanswered = UnansweredData::new(false);
        assert_eq!(unanswered.describe(), None);
        unanswered.on_sent(b"ask");
        assert_eq!(unanswered.describe().unwrap(), "no answer came");
        unanswered.on_answer();
        unanswered.on_sent(b"ask again");
        assert_eq!(
            (unanswered.describe(), resent(&unanswered).len()),
            (None, 0)
        );
        assert!(unanswered.on_broken(false));
        unanswered.on_sent(b"ask the next");
        unanswered.on_answer();
        assert!(unanswered.describe().unwrap().contains("not sent again"));
        assert!(!unanswered.on_broken(false), "that one has answered");
        // A part of the answer may be missing, although another part arrived.
        let mut cut = UnansweredData::new(false);
        cut.on_sent(b"ask");
        cut.on_answer();
        cut.on_broken(true);
        assert!(cut.describe().is_some());
    }
}
