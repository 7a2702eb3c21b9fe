//! The exchange of one client with its server: a greeting if the protocol has one, then a request and its answer.

use crate::connection_load::{MESSAGE_BYTES, RequestProtocol, fill_message};

/// Progress of an exchange. The caller sends and receives.
#[derive(Debug)]
pub(super) struct Exchange {
    protocol: RequestProtocol,
    /// Bytes of the exchange that are still to be sent.
    outgoing: Vec<u8>,
    /// The end of the answer to the greeting, while that is awaited.
    greeting_end: Option<&'static str>,
    request: Vec<u8>,
    expected: Vec<u8>,
    received: Vec<u8>,
}

impl Exchange {
    /// Begins the exchange of a client with a number of its own.
    pub fn new(protocol: RequestProtocol, number: u64) -> Exchange {
        let mut message = [0; MESSAGE_BYTES];
        fill_message(&mut message, number, 0);
        let mut exchange = Exchange {
            outgoing: Vec::new(),
            greeting_end: None,
            request: (protocol.make_request)(number, &message).into_owned(),
            expected: (protocol.expected_answer)(number, &message).into_owned(),
            received: Vec::new(),
            protocol,
        };
        match protocol.greeting {
            Some((greeting, end)) => {
                exchange.outgoing = greeting.as_bytes().to_vec();
                exchange.greeting_end = Some(end);
            }
            None => exchange.outgoing = std::mem::take(&mut exchange.request),
        }
        exchange
    }

    /// Returns the bytes to send next; none while an answer is awaited.
    pub fn outgoing(&self) -> &[u8] {
        &self.outgoing
    }

    /// Records that `count` bytes were sent.
    pub fn handle_sent(&mut self, count: usize) {
        self.outgoing.drain(..count);
    }

    /// Takes received bytes. Returns the number of wrong bytes once the answer is complete.
    pub fn handle_received(&mut self, bytes: &[u8]) -> Option<u64> {
        self.received.extend_from_slice(bytes);
        if let Some(end) = self.greeting_end {
            if self.received.ends_with(end.as_bytes()) {
                self.greeting_end = None;
                self.received.clear();
                self.outgoing.append(&mut self.request);
            }
            return None;
        }
        let is_complete = self.received.len() >= self.expected.len();
        is_complete.then(|| {
            self.protocol
                .count_wrong_bytes(&self.expected, &self.received)
        })
    }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;

    use super::*;

    /// Sends everything that is due; returns the sent bytes.
    fn send_all(exchange: &mut Exchange) -> Vec<u8> {
        let sent = exchange.outgoing().to_vec();
        exchange.handle_sent(sent.len());
        sent
    }

    #[test]
    fn echo_is_compared_to_the_byte() {
        let mut exchange = Exchange::new(RequestProtocol::ECHO, 7);
        let sent = send_all(&mut exchange);
        assert_eq!(sent.len(), MESSAGE_BYTES);
        let (first, rest) = sent.split_at(100);
        assert_eq!(exchange.handle_received(first), None);
        assert_eq!(exchange.handle_received(rest), Some(0));
        let mut exchange = Exchange::new(RequestProtocol::ECHO, 8);
        send_all(&mut exchange);
        let wrong = exchange.handle_received(&sent);
        assert!(wrong.is_some_and(|wrong| wrong > 0), "{wrong:?}");
        let mut exchange = Exchange::new(RequestProtocol::ECHO, 7);
        let surplus = [&sent[..], b"xy"].concat();
        assert_eq!(exchange.handle_received(&surplus), Some(2));
    }

    #[test]
    fn request_follows_the_answer_to_the_greeting() {
        let protocol = RequestProtocol {
            greeting: Some(("hello\n", "\n\n")),
            make_request: |_, _| Cow::Borrowed(b"when?"),
            expected_answer: |_, _| Cow::Borrowed(b"at 00:00"),
            any_byte: Some(b'0'),
        };
        let mut exchange = Exchange::new(protocol, 0);
        assert_eq!(send_all(&mut exchange), b"hello\n");
        assert_eq!(exchange.handle_received(b"welcome\n"), None);
        assert_eq!(exchange.outgoing(), b"");
        assert_eq!(exchange.handle_received(b"\n"), None);
        assert_eq!(send_all(&mut exchange), b"when?");
        assert_eq!(exchange.handle_received(b"at 12:59"), Some(0));
        let mut exchange = Exchange::new(protocol, 0);
        exchange.handle_received(b"\n\n");
        assert_eq!(exchange.handle_received(b"At 12.59"), Some(2));
    }
}
