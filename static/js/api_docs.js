// The page of the API: the library's view of the schema, in the colours of the site.

const place = document.getElementById("api-operations");
const dark = matchMedia("(prefers-color-scheme: dark)");

function follow() {
  const theme = document.documentElement.getAttribute("data-theme");
  document.documentElement.classList.toggle("dark-mode", theme ? theme === "dark" : dark.matches);
}

follow();
dark.addEventListener("change", follow);
new MutationObserver(follow).observe(document.documentElement, { attributeFilter: ["data-theme"] });

SwaggerUIBundle({
  url: place.dataset.schema,
  domNode: place,
  deepLinking: true,
  docExpansion: "none",
  defaultModelsExpandDepth: 0,
  validatorUrl: null,
  presets: [SwaggerUIBundle.presets.apis],
  layout: "BaseLayout",
  requestInterceptor(request) {
    request.headers["X-CSRFToken"] = place.dataset.csrf;
    return request;
  },
});
