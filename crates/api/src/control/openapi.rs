//! The OpenAPI description of the control API, generated from its types.

use schemars::SchemaGenerator;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use super::{ErrorBody, Route};

/// Returns the control API in OpenAPI 3.1 form, generated from a table of routes such as [`ROUTES`](super::ROUTES) or
/// [`REGISTRAR_ROUTES`](super::REGISTRAR_ROUTES). The daemon serves it at `/openapi.json`.
pub fn openapi(routes: &[Route]) -> Value {
    let settings =
        SchemaSettings::draft2020_12().with(|s| s.definitions_path = "/components/schemas".into());
    let mut generator = settings.into_generator();
    let error = generator.subschema_for::<ErrorBody>().to_value();
    let mut paths = Map::new();
    for route in routes {
        let operation = operation(route, &error, &mut generator);
        let path = paths.entry(route.path).or_insert_with(|| json!({}));
        path[route.method.to_lowercase()] = operation;
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "Holdfast control API",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "HTTP/1.1 on the daemon's Unix socket. Errors have a body with `error` and `what_to_do`.",
            "license": {"name": "Apache-2.0 OR MIT"},
        },
        "paths": paths,
        "components": {"schemas": generator.take_definitions(true)},
    })
}

fn operation(route: &Route, error: &Value, generator: &mut SchemaGenerator) -> Value {
    let content = match route.answer {
        Some(answer) => json!({"application/json": {"schema": answer(generator).to_value()}}),
        None => json!({"text/plain": {"schema": {"type": "string"}}}),
    };
    let mut operation = json!({
        "summary": route.summary,
        "parameters": parameters(route, generator),
        "responses": {
            (route.status.to_string()): {"description": "Done.", "content": content},
            "default": {"description": "Refused.", "content": {"application/json": {"schema": error}}},
        },
    });
    if let Some(body) = route.body {
        let schema = body(generator).to_value();
        operation["requestBody"] =
            json!({"required": true, "content": {"application/json": {"schema": schema}}});
    }
    operation
}

fn parameters(route: &Route, generator: &mut SchemaGenerator) -> Vec<Value> {
    let in_path = route.path.split(['{', '}']).skip(1).step_by(2);
    let mut parameters: Vec<Value> = in_path
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    if let Some(query) = route.query {
        let reference = query(generator).to_value();
        let name = reference["$ref"]
            .as_str()
            .and_then(|path| path.rsplit('/').next())
            .unwrap_or_default();
        let properties = generator
            .definitions()
            .get(name)
            .and_then(|schema| schema["properties"].as_object());
        for (name, schema) in properties.into_iter().flatten() {
            parameters
                .push(json!({"name": name, "in": "query", "required": false, "schema": schema}));
        }
    }
    parameters
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::control::{POOL_ROUTES, REGISTRAR_ROUTES, ROUTES};

    const ALL_ROUTES: [&[Route]; 3] = [ROUTES, REGISTRAR_ROUTES, POOL_ROUTES];

    #[test]
    fn every_route_is_described() {
        for routes in ALL_ROUTES {
            let description = openapi(routes);
            for route in routes {
                let operation = &description["paths"][route.path][route.method.to_lowercase()];
                assert_eq!(
                    operation["summary"], route.summary,
                    "{} {}",
                    route.method, route.path
                );
                assert!(operation["responses"][route.status.to_string()].is_object());
                assert_eq!(operation["requestBody"].is_object(), route.body.is_some());
            }
        }
        let description = openapi(ROUTES);
        let query: Vec<_> = description["paths"]["/v1/flows"]["get"]["parameters"]
            .as_array()
            .unwrap()
            .clone();
        assert!(query.iter().any(|parameter| parameter["name"] == "after"));
        assert_eq!(
            description["paths"]["/v1/handoffs/{id}"]["get"]["parameters"][0]["name"],
            "id"
        );
    }

    #[test]
    fn every_reference_resolves() {
        fn visit(value: &Value, root: &Value) {
            match value {
                Value::Object(map) => {
                    if let Some(Value::String(reference)) = map.get("$ref") {
                        let pointer = reference.strip_prefix('#').expect("a local reference");
                        assert!(root.pointer(pointer).is_some(), "{reference} has no target");
                    }
                    map.values().for_each(|value| visit(value, root));
                }
                Value::Array(list) => list.iter().for_each(|value| visit(value, root)),
                _ => {}
            }
        }
        for description in ALL_ROUTES.map(openapi) {
            visit(&description, &description);
        }
    }

    #[test]
    fn every_field_has_a_description() {
        for description in ALL_ROUTES.map(openapi) {
            for (name, schema) in description["components"]["schemas"].as_object().unwrap() {
                assert!(schema["description"].is_string(), "{name}");
                for (field, schema) in schema["properties"].as_object().into_iter().flatten() {
                    assert!(
                        schema["description"].is_string() || schema["const"].is_string(),
                        "{name}.{field}: {schema}"
                    );
                }
            }
        }
    }
}
