//! The number of connections that a limit of open descriptors permits.

/// Most descriptors of one connection: two sockets, and in each direction a pipe with two ends while data waits.
const DESCRIPTORS_PER_CONNECTION: u64 = 6;
/// Descriptors that do not belong to a connection: listeners, the runtime, the session with the daemon, the standard
/// streams, and pipes kept for reuse.
const DESCRIPTORS_RESERVED: u64 = 64 + 2 * super::pipe_pool::IDLE_PIPES_MAX as u64;

/// The limit of open descriptors (RLIMIT_NOFILE) is too low for the wanted number of connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted} connections need up to {needed} open descriptors, but this process may open {limit}, which permits \
     {possible} connections; raise the limit (LimitNOFILE= of the unit, or `ulimit -n`), or lower the number"
)]
pub struct DescriptorShortage {
    /// The wanted number of connections.
    pub wanted: u64,
    /// Number of descriptors for that number of connections.
    pub needed: u64,
    /// Number of descriptors that this process may open (RLIMIT_NOFILE).
    pub limit: u64,
    /// Most connections that the limit permits.
    pub possible: u64,
}

/// Returns the maximum number of connections: the wanted number, or as many as `limit` open descriptors permit.
///
/// # Errors
/// The limit does not permit the wanted number, or not even one connection.
pub fn connections_max(limit: u64, wanted: Option<u64>) -> Result<usize, DescriptorShortage> {
    let possible = limit.saturating_sub(DESCRIPTORS_RESERVED) / DESCRIPTORS_PER_CONNECTION;
    let wanted = wanted.unwrap_or(possible.max(1));
    if wanted > possible {
        return Err(DescriptorShortage {
            wanted,
            needed: wanted
                .saturating_mul(DESCRIPTORS_PER_CONNECTION)
                .saturating_add(DESCRIPTORS_RESERVED),
            limit,
            possible,
        });
    }
    Ok(usize::try_from(wanted).unwrap_or(usize::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_as_many_as_the_limit_permits() {
        assert_eq!(connections_max(DESCRIPTORS_RESERVED + 605, None), Ok(100));
    }

    #[test]
    fn wanted_number_within_the_limit_is_taken() {
        assert_eq!(connections_max(1 << 20, Some(5000)), Ok(5000));
    }

    #[test]
    fn number_beyond_the_limit_is_refused_with_the_possible_number() {
        let limit = DESCRIPTORS_RESERVED + 600;
        let shortage = connections_max(limit, Some(101)).unwrap_err();
        assert_eq!((shortage.possible, shortage.needed), (100, limit + 6));
        assert!(connections_max(10, None).is_err());
        assert!(connections_max(u64::MAX, Some(u64::MAX)).is_err());
    }
}
