//! `[etcd]`: the store of a group's views.

use std::fmt;
use std::path::PathBuf;

/// Settings of the store of views in etcd v3.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdConfig {
    /// Members of etcd, or proxies in front of them; at least one.
    pub endpoints: Vec<EtcdEndpoint>,
    /// Beginning of the key, which the group's name and `/view` follow.
    pub prefix: String,
    /// Certificates of the authority that signed those of the endpoints; none without TLS.
    pub ca: Option<PathBuf>,
    /// This node's certificate for etcd; none if etcd asks for none.
    pub certificate: Option<PathBuf>,
    /// Key of `certificate`.
    pub key: Option<PathBuf>,
    /// User of etcd; none if etcd has no authentication.
    pub user: Option<String>,
    /// File with the user's password.
    pub password_file: Option<PathBuf>,
}

/// An endpoint of etcd.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EtcdEndpoint {
    /// Host name or address.
    pub host: String,
    /// TCP port.
    pub port: u16,
    /// True for `https`.
    pub is_tls: bool,
}

impl EtcdEndpoint {
    /// Reads a URL such as `https://10.0.0.21:2379`; none for any other text.
    pub fn parse(url: &str) -> Option<EtcdEndpoint> {
        let (scheme, rest) = url.split_once("://")?;
        let is_tls = match scheme {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (host, port) = rest.rsplit_once(':')?;
        let host = match host.strip_prefix('[') {
            Some(bracketed) => bracketed
                .strip_suffix(']')?
                .parse::<std::net::Ipv6Addr>()
                .ok()?
                .to_string(),
            None => host.to_owned(),
        };
        let is_host_letter = |byte: u8| byte.is_ascii_alphanumeric() || b".-_:".contains(&byte);
        let is_name = !host.is_empty() && host.bytes().all(is_host_letter);
        let is_ipv6 = rest.starts_with('[');
        let port = port.parse().ok().filter(|port| *port != 0)?;
        (is_name && host.contains(':') == is_ipv6).then_some(EtcdEndpoint { host, port, is_tls })
    }

    /// Returns host and port, as in a URL.
    pub fn authority(&self) -> String {
        match self.host.contains(':') {
            true => format!("[{}]:{}", self.host, self.port),
            false => format!("{}:{}", self.host, self.port),
        }
    }
}

impl fmt::Display for EtcdEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scheme = match self.is_tls {
            true => "https",
            false => "http",
        };
        write!(f, "{scheme}://{}", self.authority())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn urls_round_trip() {
        for url in [
            "http://10.0.0.21:2379",
            "https://etcd-1.example:2379",
            "https://[fd00::1]:2379",
        ] {
            assert_eq!(EtcdEndpoint::parse(url).unwrap().to_string(), url);
        }
        let slash = EtcdEndpoint::parse("http://a:1/").unwrap();
        assert_eq!(slash.to_string(), "http://a:1");
    }

    #[test]
    fn other_texts_are_refused() {
        for url in [
            "",
            "10.0.0.21:2379",
            "ftp://a:1",
            "http://a",
            "http://:2379",
            "http://a:0",
            "http://a:70000",
            "http://a:1/v3",
            "http://fd00::1:2379",
            "http://[a]:1",
            "http://u@a:1",
        ] {
            assert_eq!(EtcdEndpoint::parse(url), None, "{url}");
        }
    }
}
