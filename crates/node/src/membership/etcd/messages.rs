//! Requests and responses of etcd's JSON gateway (etcd v3 API, `etcdserverpb.KV` and `etcdserverpb.Auth`). Numbers of 64
//! bits are texts; fields with the value zero are absent.

use serde::de::{Error as _, IgnoredAny};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

use super::base64;

/// Returns the request for a key's value: linearizable, unless the request says otherwise.
pub fn range_request(key: &[u8]) -> Value {
    json!({ "key": base64::encode(key) })
}

/// Returns the transaction that sets a key if its revision is this one; 0 for a key that does not exist. Otherwise the
/// transaction reads the key.
pub fn compare_and_swap_request(key: &[u8], mod_revision: u64, value: &[u8]) -> Value {
    let key = base64::encode(key);
    json!({
        "compare": [{
            "key": key,
            "target": "MOD",
            "result": "EQUAL",
            "mod_revision": mod_revision.to_string(),
        }],
        "success": [{ "request_put": { "key": key, "value": base64::encode(value) } }],
        "failure": [{ "request_range": { "key": key } }],
    })
}

/// Returns the request for an authentication token.
pub fn authenticate_request(user: &str, password: &str) -> Value {
    json!({ "name": user, "password": password })
}

/// A key's value and the revision of its last change.
#[derive(Debug, Deserialize, PartialEq, Eq)]
pub struct KeyValue {
    #[serde(deserialize_with = "number")]
    pub mod_revision: u64,
    #[serde(default, deserialize_with = "bytes")]
    pub value: Vec<u8>,
}

/// The response to [`range_request`].
#[derive(Debug, Deserialize)]
pub struct RangeResponse {
    /// Present in every response of etcd.
    #[serde(rename = "header")]
    _header: IgnoredAny,
    #[serde(default)]
    pub kvs: Vec<KeyValue>,
}

/// The response to [`compare_and_swap_request`].
#[derive(Debug, Deserialize)]
pub struct CompareAndSwapResponse {
    #[serde(rename = "header")]
    _header: IgnoredAny,
    #[serde(default)]
    pub succeeded: bool,
    #[serde(default)]
    responses: Vec<OperationResponse>,
}

#[derive(Debug, Deserialize)]
struct OperationResponse {
    response_range: Option<RangeResponse>,
}

impl CompareAndSwapResponse {
    /// Returns the key's value in a transaction that did not succeed; none without the key.
    pub fn into_present(self) -> Option<KeyValue> {
        let ranges = self.responses.into_iter();
        let mut ranges = ranges.filter_map(|response| response.response_range);
        ranges.next()?.kvs.into_iter().next()
    }
}

/// The response to [`authenticate_request`].
#[derive(Debug, Deserialize)]
pub struct AuthenticateResponse {
    pub token: String,
}

/// The response with the status of an error.
#[derive(Debug, Default, Deserialize)]
pub struct ErrorResponse {
    #[serde(default)]
    pub error: String,
    #[serde(default)]
    pub message: String,
}

fn number<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(D::Error::custom)
}

fn bytes<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
    let text = String::deserialize(deserializer)?;
    base64::decode(&text).ok_or_else(|| D::Error::custom("not base64"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn responses_of_etcd_are_read() {
        let header =
            r#""header":{"cluster_id":"1","member_id":"2","revision":"3","raft_term":"2"}"#;
        let kv = r#"{"key":"a2V5","create_revision":"2","mod_revision":"3","version":"2","value":"dg=="}"#;
        let range: RangeResponse =
            serde_json::from_str(&format!(r#"{{{header},"kvs":[{kv}],"count":"1"}}"#)).unwrap();
        let expected = KeyValue {
            mod_revision: 3,
            value: b"v".to_vec(),
        };
        assert_eq!(range.kvs, [expected]);
        let empty: RangeResponse = serde_json::from_str(&format!("{{{header}}}")).unwrap();
        assert!(empty.kvs.is_empty());
        let stored =
            r#""succeeded":true,"responses":[{"response_put":{"header":{"revision":"3"}}}]"#;
        let stored: CompareAndSwapResponse =
            serde_json::from_str(&format!("{{{header},{stored}}}")).unwrap();
        assert!(stored.succeeded);
        let refused =
            format!(r#"{{{header},"responses":[{{"response_range":{{{header},"kvs":[{kv}]}}}}]}}"#);
        let refused: CompareAndSwapResponse = serde_json::from_str(&refused).unwrap();
        assert!(!refused.succeeded);
        assert_eq!(refused.into_present().unwrap().mod_revision, 3);
    }

    #[test]
    fn other_responses_are_refused() {
        for text in [
            "",
            "{}",
            r#"{"kvs":[]}"#,
            r#"{"header":{},"kvs":[{"mod_revision":3}]}"#,
            r#"{"header":{},"kvs":[{"mod_revision":"-3"}]}"#,
            r#"{"header":{},"kvs":[{"mod_revision":"3","value":"!"}]}"#,
        ] {
            assert!(
                serde_json::from_str::<RangeResponse>(text).is_err(),
                "{text}"
            );
        }
    }
}
