//! Traffic of a network interface.

use std::fs;

/// Counters of an interface since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NetworkCounters {
    pub received_bytes: u64,
    pub sent_bytes: u64,
}

impl NetworkCounters {
    /// Reads the counters of an interface in this thread's network namespace; `None` if there is no such interface.
    pub fn read(interface: &str) -> Option<NetworkCounters> {
        parse(
            &fs::read_to_string("/proc/thread-self/net/dev").ok()?,
            interface,
        )
    }
}

/// Parses `/proc/net/dev` (proc_pid_net(5)): eight numbers about reception and eight about transmission, bytes first.
fn parse(text: &str, interface: &str) -> Option<NetworkCounters> {
    let mut lines = text.lines();
    let numbers = lines.find_map(|line| {
        let (name, numbers) = line.split_once(':')?;
        (name.trim() == interface).then_some(numbers)
    })?;
    let mut numbers = numbers.split_ascii_whitespace();
    Some(NetworkCounters {
        received_bytes: numbers.next()?.parse().ok()?,
        sent_bytes: numbers.nth(7)?.parse().ok()?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_are_found_by_the_name() {
        let text = "Inter-|   Receive  |  Transmit\n face |bytes packets\n    lo:  1 2 3 4 5 6 7 8 9 10 11\n  eth0: 100 2 3 4 5 6 7 8 900 10 11 12 13 14 15 16\n";
        let expected = NetworkCounters {
            received_bytes: 100,
            sent_bytes: 900,
        };
        assert_eq!(parse(text, "eth0"), Some(expected));
        assert_eq!(parse(text, "eth"), None);
        assert_eq!(parse("eth0: 1 2 3", "eth0"), None);
        assert!(NetworkCounters::read("lo").is_some());
    }
}
